"""The progress service: workers report to the operator over TLS, each with a token that was made for its pod."""
