"""Compiled bookkeeping: page allocator, radix trie, n-gram trie, suffix automaton, batch assembly."""
