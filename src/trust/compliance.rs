//! Restricts TLS versions, cipher suites and key exchanges by a compliance policy.
//!
//! [`Policy::builder`] starts the configuration of each TLS connection to istiod and to Wasm servers. Probes do not
//! use it, because they accept any application. A policy limits what is negotiated; a validated module needs a build
//! with the feature `fips`, which [`module`] reports.

use std::sync::Arc;

use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, kx_group};
use rustls::crypto::{CryptoProvider, SupportedKxGroup};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ConfigBuilder, SupportedCipherSuite, SupportedProtocolVersion, WantsVerifier,
};

/// The value of `COMPLIANCE_POLICY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// TLS 1.2 and 1.3, a post-quantum key exchange preferred.
    #[default]
    None,
    /// TLS 1.2 with AES-GCM over P-256.
    Fips140_2,
    /// TLS 1.2 and 1.3 with AES-GCM over P-256 and P-384.
    Fips140_3,
    /// TLS 1.3 with AES-GCM over X25519MLKEM768.
    Pqc,
}

const AES_GCM_OF_TLS12: [SupportedCipherSuite; 4] = [
    cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    cipher_suite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    cipher_suite::TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    cipher_suite::TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
];

const AES_GCM_OF_TLS13: [SupportedCipherSuite; 2] =
    [cipher_suite::TLS13_AES_128_GCM_SHA256, cipher_suite::TLS13_AES_256_GCM_SHA384];

impl Policy {
    /// Parses the name of a policy. Returns None for an unknown one.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "" => Some(Self::None),
            "fips-140-2" => Some(Self::Fips140_2),
            "fips-140-3" => Some(Self::Fips140_3),
            "pqc" => Some(Self::Pqc),
            _ => None,
        }
    }

    /// Returns true if it requires a validated module, which this build does not have.
    pub fn lacks_module(self) -> bool {
        matches!(self, Self::Fips140_2 | Self::Fips140_3) && !is_fips_mode()
    }

    pub fn builder(self) -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, rustls::Error> {
        ClientConfig::builder_with_provider(Arc::new(self.provider()))
            .with_protocol_versions(self.versions())
    }

    fn versions(self) -> &'static [&'static SupportedProtocolVersion] {
        const BOTH: &[&SupportedProtocolVersion] = &[&TLS13, &TLS12];
        match self {
            Self::None | Self::Fips140_3 => BOTH,
            Self::Fips140_2 => &BOTH[1..],
            Self::Pqc => &BOTH[..1],
        }
    }

    fn provider(self) -> CryptoProvider {
        let mut provider = default_provider();
        let (suites, groups): (_, Vec<&'static dyn SupportedKxGroup>) = match self {
            Self::None => return provider,
            Self::Fips140_2 => (AES_GCM_OF_TLS12.to_vec(), vec![kx_group::SECP256R1]),
            Self::Fips140_3 => (
                [&AES_GCM_OF_TLS13[..], &AES_GCM_OF_TLS12].concat(),
                vec![kx_group::SECP256R1, kx_group::SECP384R1],
            ),
            Self::Pqc => (AES_GCM_OF_TLS13.to_vec(), vec![kx_group::X25519MLKEM768]),
        };
        provider.cipher_suites = suites;
        provider.kx_groups = groups;
        provider
    }
}

fn is_fips_mode() -> bool {
    aws_lc_rs::try_fips_mode().is_ok()
}

/// Describes the cryptographic module of this build, and its mode.
pub fn module() -> String {
    let mode = if is_fips_mode() { "in" } else { "not in" };
    format!("AWS-LC {}, {mode} FIPS mode", aws_lc_rs::awslc_version())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::NamedGroup::{self, X25519MLKEM768, secp256r1, secp384r1};

    #[test]
    fn each_policy_allows_its_versions_suites_and_key_exchanges() {
        let table: [(&str, usize, usize, &[NamedGroup]); 3] = [
            ("fips-140-2", 1, 4, &[secp256r1]),
            ("fips-140-3", 2, 6, &[secp256r1, secp384r1]),
            ("pqc", 1, 2, &[X25519MLKEM768]),
        ];
        for (name, versions, suites, groups) in table {
            let policy = Policy::parse(name).unwrap();
            let provider = policy.provider();
            let found: Vec<_> = provider.kx_groups.iter().map(|group| group.name()).collect();
            assert_eq!(found, groups, "{name}");
            assert_eq!(provider.cipher_suites.len(), suites, "{name}");
            for suite in &provider.cipher_suites {
                assert!(format!("{:?}", suite.suite()).contains("AES"), "{suite:?}");
            }
            assert_eq!(policy.versions().len(), versions, "{name}");
            let builder = policy.builder().expect("a configuration");
            let config = builder.with_root_certificates(rustls::RootCertStore::empty());
            let is_fips = config.with_no_client_auth().fips();
            assert_eq!(is_fips, cfg!(feature = "fips"), "{name}");
            let asks = policy != Policy::Pqc;
            assert_eq!(policy.lacks_module(), asks && !cfg!(feature = "fips"));
        }
        let expected = if cfg!(feature = "fips") { ", in" } else { "not in" };
        assert!(module().ends_with(&format!("{expected} FIPS mode")), "{}", module());
        assert_eq!(Policy::parse(""), Some(Policy::None));
        assert_eq!(Policy::parse("fips"), None);
    }
}
