"""What is sent and when: samples, arrival processes, generators and recorded traces."""
