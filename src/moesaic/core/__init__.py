"""The nouns: plain records that all other rooms share. They need numpy and the standard library only."""
