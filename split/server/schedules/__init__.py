"""How clients share the server's blocks; each schedule is one module (FL-GLM section 3.3)."""
