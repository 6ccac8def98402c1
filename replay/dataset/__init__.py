"""The row format and file formats of exported data sets, shared by export and import."""
