//! Messages generated from `proto/`, one module per package.

#![allow(
    missing_debug_implementations,
    unreachable_pub,
    unused_qualifications,
    clippy::unwrap_used,
    clippy::wildcard_imports
)]

/// The package `istio.v1.auth`: the certificate service.
pub mod istio_v1_auth {
    tonic::include_proto!("istio.v1.auth");
}

/// The package `grpc.health.v1`: the health check of gRPC servers.
pub mod grpc_health_v1 {
    tonic::include_proto!("grpc.health.v1");
}

/// The package `istio.mesh.v1alpha1`, of which the agent uses `ProxyConfig`.
pub mod istio_mesh_v1alpha1 {
    tonic::include_proto!("istio.mesh.v1alpha1");
}
