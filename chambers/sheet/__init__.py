"""Human evaluation (FedJudge 4.3.3): blinded sheets, and a table of the annotators' scores."""
