"""`mpitrain data`: show (provenance), inspect and convert (inspection), prepare (training/)."""
