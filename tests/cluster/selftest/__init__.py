"""A package, so that its clusters (fixtures of scope "package") end with its last test and not with the whole run."""
