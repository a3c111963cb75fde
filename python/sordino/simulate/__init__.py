"""`sordino simulate`: training with virtual workers in virtual time, over links of any speed."""
