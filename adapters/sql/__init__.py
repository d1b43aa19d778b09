"""What the SQL stores share: the read models' tables and the queries over them."""
