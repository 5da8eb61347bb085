//! Intercepts ECDS: has the Wasm modules of filters fetched, and forwards the response with them as
//! files.
//!
//! A module that is missing is replaced by a filter that allows or denies all requests, and the
//! response is forwarded again, with the same version and nonce, once the module is there. istiod
//! takes the second ACK as a repetition of the first.
//!
//! A newer response of the stream takes the place of one that waits. In delta, the resources that only
//! the older one had are added to it.

use std::collections::HashSet;

use bytes::Bytes;
use tokio::time::sleep_until;

use crate::wasm::{Converted, Wasm, wire};
use crate::xds::Protocol;
use crate::xds::intercept::{Intercepting, Interceptor, Later, Outcome};

const TYPE_URL: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";

/// Of resources in a response, in both protocols, and of the `Any` in a `Resource` of delta.
const RESOURCES: u32 = 2;
const RESOURCE: u32 = 2;
/// Of names in delta: of a resource, and of those removed.
const NAME: u32 = 3;
const REMOVED: u32 = 6;

/// The interceptor of ECDS responses.
#[derive(Debug)]
pub(super) struct Ecds(Wasm);

impl Ecds {
    pub(super) fn new(wasm: Wasm) -> Self {
        Self(wasm)
    }
}

impl Interceptor for Ecds {
    fn type_url(&self) -> &str {
        TYPE_URL
    }

    fn subscribes(&self) -> bool {
        false
    }

    fn intercept(&self, protocol: Protocol, message: Bytes) -> Intercepting {
        converted(self.0.clone(), protocol, message, None)
    }

    fn merge(&self, protocol: Protocol, older: &Bytes, newer: &Bytes) -> Option<Bytes> {
        Some(match protocol {
            Protocol::Sotw => newer.clone(),
            // What cannot be read is handled as it came.
            Protocol::Delta => merged(older, newer).unwrap_or_else(|_| newer.clone()),
        })
    }
}

/// The response with its modules as files. `last` is an earlier result, which is not forwarded again.
fn converted(
    wasm: Wasm,
    protocol: Protocol,
    message: Bytes,
    mut last: Option<Converted>,
) -> Intercepting {
    Box::pin(async move {
        loop {
            if let Some(retry_at) = last.as_ref().and_then(|last| last.retry_at) {
                sleep_until(retry_at).await;
            }
            let (rewritten, converted) = match rewrite(&wasm, protocol, &message).await {
                Ok(rewritten) => rewritten,
                Err(problem) => return Outcome::Rejected(problem),
            };
            let is_progress = last
                .as_ref()
                .is_none_or(|last| converted.missing < last.missing);
            if !is_progress {
                last = Some(converted);
                continue;
            }
            if converted.retry_at.is_none() {
                return Outcome::Forward(rewritten);
            }
            let later = self::converted(wasm, protocol, message, Some(converted));
            return Outcome::ForwardAnd(rewritten, Later(later));
        }
    })
}

/// The response with other resources where they changed; byte for byte the same where none did.
async fn rewrite(
    wasm: &Wasm,
    protocol: Protocol,
    message: &Bytes,
) -> Result<(Bytes, Converted), String> {
    let broken = |error| format!("discovery response from istiod: {error}");
    let fields = wire::fields(message).map_err(broken)?;
    let (mut resources, mut places) = (Vec::new(), Vec::new());
    for (place, field) in fields.iter().enumerate() {
        let Some(content) = field.content.as_ref().filter(|_| field.number == RESOURCES) else {
            continue;
        };
        let any = match protocol {
            Protocol::Sotw => Some(content.clone()),
            Protocol::Delta => wire::last(content, RESOURCE).map_err(broken)?,
        };
        // Without one it is refused.
        resources.push(any.unwrap_or_default());
        places.push(place);
    }
    let converted = wasm.convert(&resources).await?;
    if converted.resources.iter().all(Option::is_none) {
        return Ok((message.clone(), converted));
    }
    let mut rewritten = Vec::with_capacity(message.len());
    let mut changes = places.iter().zip(&converted.resources).peekable();
    for (place, field) in fields.iter().enumerate() {
        let change = changes.next_if(|(changed, _)| **changed == place);
        match (
            change.and_then(|(_, resource)| resource.clone()),
            &field.content,
        ) {
            (Some(any), Some(content)) => {
                let content = match protocol {
                    Protocol::Sotw => any,
                    Protocol::Delta => {
                        let replaced = wire::edited(content, RESOURCE, |_| Ok(Some(any)));
                        replaced.map_err(broken)?
                    }
                };
                wire::append(&mut rewritten, RESOURCES, &content);
            }
            _ => rewritten.extend_from_slice(&field.record),
        }
    }
    Ok((rewritten.into(), converted))
}

/// The newer delta response with what only the older one had. A response is the sum of its fields.
fn merged(older: &Bytes, newer: &Bytes) -> Result<Bytes, wire::DecodeError> {
    let named = |message: &Bytes| -> Result<Vec<_>, wire::DecodeError> {
        let fields = wire::fields(message)?.into_iter();
        let mut named = Vec::new();
        for field in fields {
            let name = match (field.number, &field.content) {
                (RESOURCES, Some(content)) => wire::last(content, NAME)?,
                (REMOVED, name) => name.clone(),
                _ => continue,
            };
            named.push((name.unwrap_or_default(), field.record));
        }
        Ok(named)
    };
    let known: HashSet<_> = named(newer)?.into_iter().map(|(name, _)| name).collect();
    let older = named(older)?.into_iter();
    let older = older.filter(|(name, _)| !known.contains(name));
    let mut merged = newer.to_vec();
    older.for_each(|(_, record)| merged.extend_from_slice(&record));
    Ok(merged.into())
}
