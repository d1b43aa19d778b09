"""The read models in SQL, shared by SQLite and PostgreSQL: their tables, updates and queries."""
