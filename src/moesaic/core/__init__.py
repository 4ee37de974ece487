"""The nouns: plain records that every other room speaks in. numpy and the standard library only."""
