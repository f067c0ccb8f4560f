"""The lab: reproduction of the papers, vision, and training after pretraining. No other package depends on the lab."""
