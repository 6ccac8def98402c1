"""One module per API that clients use: each turns bodies into Requests, and Answers into bytes."""
