"""Parts that not every project needs: YAML configurations, doctor, figures, a progress bar."""
