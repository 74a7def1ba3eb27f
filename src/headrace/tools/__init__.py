"""Tools around a run: profile, autoscale, plan, report, plot, doctor."""
