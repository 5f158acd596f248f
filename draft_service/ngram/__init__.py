"""The trie drafter: n-gram tries over what was generated, and the compiled loops that read them."""
