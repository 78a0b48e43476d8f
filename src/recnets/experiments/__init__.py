"""The paper's tables: every row as data, the runs that fill them, the ledger, and what is drawn from it."""
