"""One attention worker as a group of processes: heads split over its ranks, experts spread over them."""
