"""The paper's tables again: which runs make each of them, and what came out beside what is printed."""
