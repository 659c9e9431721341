"""From a credential to a caller, and what that caller may use: keys, tokens, limits, audit, administration."""
