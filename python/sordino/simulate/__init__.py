"""`sordino simulate`: workers that really train, in virtual time, over links of any speed."""
