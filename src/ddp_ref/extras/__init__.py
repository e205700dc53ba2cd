"""Parts that not every project needs: YAML configurations, figures, a progress bar."""
