"""How good the models are: metrics, the tables of results, and whether differences are more than noise."""
