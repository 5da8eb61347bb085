//! The fields that are read of Envoy's messages. Decoding steps over all others.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::{Message, Oneof};
use prost_types::{Duration, Struct};

/// `google.protobuf.Any`
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Any {
    #[prost(string, tag = "1")]
    pub(crate) type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) value: Bytes,
}

/// `envoy.config.core.v3.TypedExtensionConfig`
#[derive(Clone, PartialEq, Message)]
pub(super) struct TypedExtensionConfig {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "2")]
    pub(super) typed_config: Option<Any>,
}

/// `udpa.type.v1.TypedStruct`
#[derive(Clone, PartialEq, Message)]
pub(super) struct TypedStruct {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(message, optional, tag = "2")]
    pub(super) value: Option<Struct>,
}

/// `envoy.extensions.filters.http.wasm.v3.Wasm`, and the same of network filters.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Wasm {
    #[prost(message, optional, tag = "1")]
    pub(super) config: Option<PluginConfig>,
}

/// `envoy.extensions.wasm.v3.PluginConfig`
#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginConfig {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "3")]
    pub(super) vm_config: Option<VmConfig>,
    #[prost(bool, tag = "5")]
    pub(super) fail_open: bool,
    #[prost(int32, tag = "7")]
    pub(super) failure_policy: i32,
}

/// `envoy.extensions.wasm.v3.VmConfig`
#[derive(Clone, PartialEq, Message)]
pub(super) struct VmConfig {
    #[prost(message, optional, tag = "3")]
    pub(super) code: Option<AsyncDataSource>,
    #[prost(message, optional, tag = "7")]
    pub(super) environment_variables: Option<EnvironmentVariables>,
}

/// `envoy.config.core.v3.AsyncDataSource`
#[derive(Clone, PartialEq, Message)]
pub(super) struct AsyncDataSource {
    #[prost(oneof = "Specifier", tags = "1, 2")]
    pub(super) specifier: Option<Specifier>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Specifier {
    #[prost(message, tag = "1")]
    Local(DataSource),
    #[prost(message, tag = "2")]
    Remote(RemoteDataSource),
}

/// `envoy.config.core.v3.DataSource`
#[derive(Clone, PartialEq, Message)]
pub(super) struct DataSource {
    #[prost(string, tag = "1")]
    pub(super) filename: String,
}

/// `envoy.config.core.v3.RemoteDataSource`
#[derive(Clone, PartialEq, Message)]
pub(super) struct RemoteDataSource {
    #[prost(message, optional, tag = "1")]
    pub(super) http_uri: Option<HttpUri>,
    #[prost(string, tag = "2")]
    pub(super) sha256: String,
}

/// `envoy.config.core.v3.HttpUri`
#[derive(Clone, PartialEq, Message)]
pub(super) struct HttpUri {
    #[prost(string, tag = "1")]
    pub(super) uri: String,
    #[prost(message, optional, tag = "3")]
    pub(super) timeout: Option<Duration>,
}

/// `envoy.extensions.wasm.v3.EnvironmentVariables`
#[derive(Clone, PartialEq, Message)]
pub(super) struct EnvironmentVariables {
    #[prost(string, repeated, tag = "1")]
    pub(super) host_env_keys: Vec<String>,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(super) key_values: BTreeMap<String, String>,
}

/// An entry of `key_values`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Entry {
    #[prost(string, tag = "1")]
    pub(super) key: String,
}
