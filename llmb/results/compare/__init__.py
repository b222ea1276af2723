"""Statistics of comparisons: intervals of correlated samples, ratios, baselines, paired tests of two configurations."""
