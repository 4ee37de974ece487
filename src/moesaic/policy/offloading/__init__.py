"""How a model larger than its fast memory is computed: schedules as task lists, their prices, the search."""
