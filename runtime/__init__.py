"""Cache pool, page tables, batching, scheduling, engine and the loader of built libraries."""
