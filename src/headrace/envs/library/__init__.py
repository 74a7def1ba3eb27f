"""The kernel environments that come with Headrace."""
