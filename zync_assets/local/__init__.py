"""Services of one's own on this machine: a broker, a registry, and the Java that runs them."""
