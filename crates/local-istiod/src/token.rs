//! Workload tokens, which are minted for an identity and verified like Kubernetes service account
//! tokens.
//!
//! A token is a JWT with an ES256 signature by the key of this control plane. Its subject has the form
//! that Kubernetes uses, `system:serviceaccount:<namespace>:<service account>`.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair,
    UnparsedPublicKey,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};

/// The audience that istiod requires.
pub(super) const AUDIENCE: &str = "istio-ca";

const SUBJECT_PREFIX: &str = "system:serviceaccount:";

/// The claims of a token about its bearer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    #[serde(rename = "sub")]
    pub subject: String,
    #[serde(rename = "aud")]
    pub audiences: Vec<String>,
    /// The time of expiry in seconds since 1970.
    #[serde(rename = "exp")]
    pub expires: u64,
}

/// The service account that a valid token belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Account {
    pub(super) namespace: String,
    pub(super) service_account: String,
}

/// The key that signs tokens.
pub(super) struct TokenKey(EcdsaKeyPair);

/// The reason why a token is not accepted. It never contains the token.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum TokenError {
    #[error("token is malformed: {0}")]
    Malformed(&'static str),
    #[error("token signature does not match the key of this control plane")]
    Signature,
    #[error("token audiences are {found:?}, expected {AUDIENCE:?} among them")]
    Audience { found: Vec<String> },
    #[error("token expired {seconds} s ago")]
    Expired { seconds: u64 },
    #[error("token subject is {found:?}, expected {SUBJECT_PREFIX}<namespace>:<service account>")]
    Subject { found: String },
}

/// The reason why the key could not be generated, read, written or used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} the token key: {reason}")]
pub struct TokenKeyError {
    action: &'static str,
    reason: String,
}

impl Claims {
    /// Returns the claims that Kubernetes would write for an account, valid from `now` for `ttl`.
    pub fn of(namespace: &str, service_account: &str, now: SystemTime, ttl: Duration) -> Self {
        Self {
            subject: format!("{SUBJECT_PREFIX}{namespace}:{service_account}"),
            audiences: vec![AUDIENCE.to_owned()],
            expires: seconds(now + ttl),
        }
    }
}

impl TokenKey {
    pub(super) fn generate() -> Result<Self, TokenKeyError> {
        EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING)
            .map(Self)
            .map_err(failed("generate"))
    }

    pub(super) fn from_pkcs8(der: &[u8]) -> Result<Self, TokenKeyError> {
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der)
            .map(Self)
            .map_err(failed("read"))
    }

    /// Returns the private key, for the state folder.
    pub(super) fn to_pkcs8(&self) -> Result<Vec<u8>, TokenKeyError> {
        let document = self.0.to_pkcs8v1().map_err(failed("write"))?;
        Ok(document.as_ref().to_vec())
    }

    pub(super) fn mint(&self, claims: &Claims) -> Result<String, TokenKeyError> {
        let header = URL_SAFE_NO_PAD.encode(r#"{"alg":"ES256","typ":"JWT"}"#);
        let claims = serde_json::to_vec(claims).map_err(failed("sign with"))?;
        let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims));
        let signature =
            self.0.sign(&SystemRandom::new(), signed.as_bytes()).map_err(failed("sign with"))?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    pub(super) fn verify(&self, token: &str, now: SystemTime) -> Result<Account, TokenError> {
        let (signed, signature) =
            token.rsplit_once('.').ok_or(TokenError::Malformed("no signature"))?;
        let (_, claims) = signed.split_once('.').ok_or(TokenError::Malformed("no claims"))?;
        // The algorithm in the header is ignored, because the only key supports only one algorithm.
        let signature = decode(signature, "signature is not base64url")?;
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.0.public_key().as_ref())
            .verify(signed.as_bytes(), &signature)
            .map_err(|_| TokenError::Signature)?;
        let claims = decode(claims, "claims are not base64url")?;
        let claims = serde_json::from_slice(&claims)
            .map_err(|_| TokenError::Malformed("claims lack sub, aud or exp"))?;
        check(claims, seconds(now))
    }
}

fn check(claims: Claims, now: u64) -> Result<Account, TokenError> {
    if !claims.audiences.iter().any(|found| found == AUDIENCE) {
        return Err(TokenError::Audience { found: claims.audiences });
    }
    if claims.expires <= now {
        return Err(TokenError::Expired { seconds: now - claims.expires });
    }
    match claims.subject.strip_prefix(SUBJECT_PREFIX).and_then(|account| account.split_once(':')) {
        Some((namespace, service_account))
            if !namespace.is_empty()
                && !service_account.is_empty()
                && !service_account.contains(':') =>
        {
            Ok(Account {
                namespace: namespace.to_owned(),
                service_account: service_account.to_owned(),
            })
        }
        _ => Err(TokenError::Subject { found: claims.subject }),
    }
}

fn decode(part: &str, malformed: &'static str) -> Result<Vec<u8>, TokenError> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_| TokenError::Malformed(malformed))
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn failed<E: fmt::Display>(action: &'static str) -> impl FnOnce(E) -> TokenKeyError {
    move |error| TokenKeyError { action, reason: error.to_string() }
}

impl fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn claims() -> Claims {
        Claims::of("shop", "cart", at(1_000), Duration::from_secs(100))
    }

    #[test]
    fn accepts_its_own_token_for_its_account() {
        let key = TokenKey::generate().unwrap();
        let again = TokenKey::from_pkcs8(&key.to_pkcs8().unwrap()).unwrap();
        let token = key.mint(&claims()).unwrap();
        let account = again.verify(&token, at(1_050)).unwrap();
        assert_eq!(account.namespace, "shop");
        assert_eq!(account.service_account, "cart");
    }

    #[test]
    fn refuses_a_token_of_another_key_or_with_other_claims() {
        let key = TokenKey::generate().unwrap();
        let stranger = TokenKey::generate().unwrap().mint(&claims()).unwrap();
        assert_eq!(key.verify(&stranger, at(1_050)), Err(TokenError::Signature));
        let own = key.mint(&claims()).unwrap();
        let mut parts: Vec<_> = own.split('.').collect();
        let forged = URL_SAFE_NO_PAD.encode(r#"{"sub":"a","aud":[],"exp":1}"#);
        parts[1] = &forged;
        let forged = parts.join(".");
        assert_eq!(key.verify(&forged, at(1_050)), Err(TokenError::Signature));
    }

    #[test]
    fn refuses_what_is_expired_or_for_somebody_else() {
        let key = TokenKey::generate().unwrap();
        let verify = |claims: &Claims| key.verify(&key.mint(claims).unwrap(), at(1_100));
        assert_eq!(verify(&claims()), Err(TokenError::Expired { seconds: 0 }));
        let valid = Claims { expires: 2_000, ..claims() };
        assert!(verify(&valid).is_ok());
        let found = vec!["kubernetes".to_owned()];
        let audiences = found.clone();
        let other = Claims { audiences, ..valid.clone() };
        assert_eq!(verify(&other), Err(TokenError::Audience { found }));
        for subject in ["", "alice", "system:serviceaccount:shop", "system:serviceaccount::a"] {
            let found = subject.to_owned();
            let other = Claims { subject: found.clone(), ..valid.clone() };
            assert_eq!(verify(&other), Err(TokenError::Subject { found }));
        }
    }

    #[test]
    fn refuses_garbage() {
        let key = TokenKey::generate().unwrap();
        for token in ["", ".", "..", "a.b", "a.b.c", "\u{e9}.\u{e9}.\u{e9}"] {
            assert!(key.verify(token, at(0)).is_err(), "{token:?}");
        }
    }
}
