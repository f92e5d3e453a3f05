"""What a party of a split model holds; nothing here touches the network."""
