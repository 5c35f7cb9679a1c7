"""What the containers of docker-compose.yml run beside `streamrft` itself."""
