"""One module per API that clients speak; each turns bodies into Requests and Answers into bytes."""
