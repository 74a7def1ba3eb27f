"""Measuring, finding sizes, planning machines."""
