"""What the integration tests share: a real attnd process, the contract, a float64 reference."""
