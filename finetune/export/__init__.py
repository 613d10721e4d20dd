"""A folder ready for the Hub, its model card, and the verifier of any model folder."""
