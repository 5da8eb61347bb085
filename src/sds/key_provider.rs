//! Configures private key providers: extensions of Envoy that sign with special hardware.
//!
//! An Envoy without the extension rejects the secret, unless it may fall back.

use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::DataSource;
use envoy_types::pb::envoy::extensions::transport_sockets::tls::v3::{
    PrivateKeyProvider, TlsCertificate, private_key_provider::ConfigType,
};
use envoy_types::pb::google::protobuf::{Any, Duration as ProtoDuration};
use prost::Message;

/// The setting `privateKeyProvider` of the proxy configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyProvider {
    pub kind: Kind,
    /// The time for which Envoy collects work before it gives it to the hardware.
    pub poll_delay: Option<Duration>,
    /// True if Envoy does the work itself when the hardware is missing.
    pub fallback: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    CryptoMb,
    Qat,
}

/// The configuration of both extensions.
#[derive(Clone, PartialEq, Message)]
struct MethodConfig {
    #[prost(message, optional, tag = "1")]
    private_key: Option<DataSource>,
    #[prost(message, optional, tag = "2")]
    poll_delay: Option<ProtoDuration>,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::CryptoMb => "cryptomb",
            Self::Qat => "qat",
        }
    }

    const fn type_url(self) -> &'static str {
        match self {
            Self::CryptoMb => {
                "type.googleapis.com/envoy.extensions.private_key_providers.cryptomb.v3alpha.\
                 CryptoMbPrivateKeyMethodConfig"
            }
            Self::Qat => {
                "type.googleapis.com/envoy.extensions.private_key_providers.qat.v3alpha.\
                 QatPrivateKeyMethodConfig"
            }
        }
    }
}

impl KeyProvider {
    /// Moves the key into the extension's configuration.
    pub(super) fn wrap_key(&self, pair: TlsCertificate) -> TlsCertificate {
        let config = MethodConfig {
            private_key: pair.private_key,
            poll_delay: self.poll_delay.map(|delay| ProtoDuration {
                seconds: i64::try_from(delay.as_secs()).unwrap_or(i64::MAX),
                nanos: delay.subsec_nanos().cast_signed(),
            }),
        };
        TlsCertificate {
            private_key: None,
            private_key_provider: Some(PrivateKeyProvider {
                provider_name: self.kind.name().to_owned(),
                config_type: Some(ConfigType::TypedConfig(Any {
                    type_url: self.kind.type_url().to_owned(),
                    value: config.encode_to_vec(),
                })),
                fallback: self.fallback,
            }),
            ..pair
        }
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;

    use super::*;

    #[test]
    fn the_key_provider_gets_the_private_key_and_the_poll_delay() {
        let key = DataSource {
            specifier: Some(Specifier::InlineBytes(b"key".to_vec())),
            ..Default::default()
        };
        let pair = TlsCertificate {
            private_key: Some(key.clone()),
            certificate_chain: Some(DataSource::default()),
            ..Default::default()
        };
        for (kind, name) in [(Kind::CryptoMb, "cryptomb"), (Kind::Qat, "qat")] {
            let provider = KeyProvider {
                kind,
                poll_delay: Some(Duration::from_millis(2_500)),
                fallback: true,
            };
            let given = provider.wrap_key(pair.clone());
            assert_eq!(given.private_key, None);
            assert_eq!(given.certificate_chain, pair.certificate_chain);
            let given = given.private_key_provider.expect("is set");
            assert!(given.fallback && given.provider_name == name);
            let Some(ConfigType::TypedConfig(any)) = given.config_type else {
                panic!("no configuration");
            };
            assert!(!any.type_url.contains(' ') && any.type_url.contains(name));
            let config = MethodConfig::decode(&*any.value).expect("decodes");
            assert_eq!(config.private_key.as_ref(), Some(&key));
            let delay = config.poll_delay.expect("is set");
            assert_eq!((delay.seconds, delay.nanos), (2, 500_000_000));
        }
    }
}
