package inventory
