"""lamina.lab: reproduction of papers, vision, and training after pretraining. No other package depends on the lab."""
