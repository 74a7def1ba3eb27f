"""Networks, distributions, normalizers, the policy."""
