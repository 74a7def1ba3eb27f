"""`headrace track`: a run's metrics, sent to an experiment tracker."""
