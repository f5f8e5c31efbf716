"""What a run has made, to be taken away: an adapter or a merged model in a folder, with its card and the next lines."""
