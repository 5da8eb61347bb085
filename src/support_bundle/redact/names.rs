//! Classifies names of settings, headers and members of JSON by the secrecy of their values.

use std::sync::LazyLock;

use Member::{Headers, Key, Name, Other, Public, Secret, SecretText, Value};
use regex::{Regex, RegexSet};

/// The kind of a member of an object, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Member {
    Other,
    /// A secret. If an object has the name, all members of the object are secret, too.
    Secret,
    /// A secret, unless it is an object.
    SecretText,
    /// A public value, also as a part of a secret.
    Public,
    /// A name or key that describes the value next to it.
    Name,
    Key,
    /// The value next to a name or key, or one with which it is compared.
    Value,
    /// A header, or a list of headers.
    Headers,
}

/// Patterns of names in lower case and without punctuation. The first one that matches decides.
const NAMES: [(&str, Member); 10] = [
    ("name|headername", Name),
    ("key", Key),
    (
        "(raw|string)?val(ue)?|(exact|prefix|suffix|contains|regex)(match)?|inlinestring|inlinebytes",
        Value,
    ),
    (
        "certificatechain|trustedca|validationcontext|sdsconfig|ocspstaple|crl|type|filename|path|\
         versioninfo|lastupdated|clustername",
        Public,
    ),
    // Keys of JSON web tokens are not always public ones; `users` belongs to basic authentication.
    (
        "(local)?jwks|users|(.*(basic|docker|http|npm|proxy|redis(cli)?|registry|smtp))?auths?|(xds|ca)header.*",
        Secret,
    ),
    // Files, members of Envoy's configuration, and variables that Kubernetes sets for each service.
    (
        ".*(file|filename|path|name|type|ttl|ur[il]|endpoint|configs?|bucket|perfill|(max|total|prompt|completion|input|output)tokens|count|total|size|length|limit|used|remaining|\
         age|expir(y|ation|es(at|in)?)|lifetime|duration|seconds|interval|version|status|compat|expat|enabled|required|algorithm|issuer|audience|policy|format|mode|provider|source|\
         activesecrets|warmingsecrets|staticsecrets|host|port|addr|proto|tcp|udp|bypass)",
        Other,
    ),
    // Keys of map entries, descriptors and headers, and names of files in the metadata of a node.
    (
        "keys|.*(annotation|cache|connection|description|descriptor|disable|duplicate|enabled|env|\
         factory|field|fields|generic|hash|header|id|json|labels?|map|metadata|object|partition|pool|\
         public|redundant|route|runtime|selectedhost|share|sort|state|string|tlsclient|tlsserver|\
         topology)keys?",
        Other,
    ),
    (".*(authorization|cookie).*|.*signature(256)?", SecretText),
    (
        ".*(password|passwd|passphrase|passcode|secret|token|credential|privatekey|apikey|accesskey|pkcs12|connectionstring|sess(ion)?id|keydata|mnemonic).*|\
         .*(keys?|pass|pwd|pw|psk|pat|id(rsa|dsa|ecdsa|ed25519))|bearer|(client)?assertion|codeverifier|[cx]srf|hmac|jwt|otp",
        Secret,
    ),
    (".*(headers?|headerstoadd|initialmetadata)", Headers),
];
/// The headers of HTTP, gRPC and Envoy whose values are not secret.
const STANDARD: &str = "authority|method|path|scheme|status|host|accept(charset|encoding|language)?|age|\
    allow|baggage|cachecontrol|connection|content(encoding|length|type)|date|expect|forwarded|from|\
    origin|pragma|range|referer|server|te|tracestate|traceparent|transferencoding|upgrade|useragent|\
    vary|via|xrequestid|(accesscontrol|grpc|xb3|xenvoy|xforwarded).*";
const MAX_LENGTH: usize = 128;

impl Member {
    pub(super) fn of(name: &[u8]) -> Self {
        static ALL: LazyLock<Result<RegexSet, regex::Error>> =
            LazyLock::new(|| RegexSet::new(NAMES.map(|(names, _)| format!("^({names})$"))));
        let Ok(all) = &*ALL else {
            return Secret;
        };
        let first = all.matches(&plain(name)).iter().next();
        first.map_or(Other, |index| NAMES[index].1)
    }
}

/// Returns true if a value of this name is secret.
pub(crate) fn is_secret(name: &[u8]) -> bool {
    matches!(Member::of(name), Secret | SecretText)
}

/// Returns true for the name of a header whose value is not secret.
pub(super) fn is_standard_header(name: &[u8]) -> bool {
    static ALL: LazyLock<Result<Regex, regex::Error>> =
        LazyLock::new(|| Regex::new(&format!("^({STANDARD})$")));
    ALL.as_ref().is_ok_and(|all| all.is_match(&plain(name)))
}

/// Converts a name to lower case without punctuation. Only the end of a long name is used.
fn plain(name: &[u8]) -> String {
    let name = &name[name.len().saturating_sub(MAX_LENGTH)..];
    let letters = name.iter().filter(|byte| byte.is_ascii_alphanumeric());
    letters.map(|byte| byte.to_ascii_lowercase() as char).collect()
}
