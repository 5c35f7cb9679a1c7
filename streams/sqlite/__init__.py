"""The embedded log: one SQLite file that several processes of a machine share."""
