"""Compiled bookkeeping: pages, radix trie, n-gram trie, suffix automaton, step assembly."""
