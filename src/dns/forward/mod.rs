//! Asks the pod's resolvers.
