//! The statistics a pod adds to the default ones: annotations over ProxyConfig.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Number;

use super::Sources;
use crate::bootstrap::StatsConfig;
use crate::duration;

const PREFIX: &str = "sidecar.istio.io/";
/// Envoy's default flush interval.
const FLUSH: Duration = Duration::from_secs(5);

impl Sources<'_> {
    pub(super) fn stats(&mut self, until_idle: bool) -> StatsConfig {
        let matcher = self.proxy_config.proxy_stats_matcher.clone();
        let matcher = matcher.unwrap_or_default();
        let expected = "a duration from 1ms to less than 5m, leaving it out";
        let flush = self.interval("statsFlushInterval", expected, |flush| {
            flush.is_zero() || (1..300_000).contains(&flush.as_millis())
        });
        let expected = "a multiple of the flush interval, leaving it out";
        let multiple_of = flush.unwrap_or(FLUSH).as_nanos();
        let eviction = self.interval("statsEvictionInterval", expected, |eviction| {
            eviction.as_nanos().is_multiple_of(multiple_of)
        });
        StatsConfig {
            prefixes: self.either("statsInclusionPrefixes", &matcher.inclusion_prefixes),
            suffixes: self.either("statsInclusionSuffixes", &matcher.inclusion_suffixes),
            expressions: self.either("statsInclusionRegexps", &matcher.inclusion_regexps),
            of_requests: self.statistics_of_requests(until_idle),
            tags: self.tags(),
            buckets: self.buckets(),
            flush,
            eviction,
        }
    }

    fn stats_annotation(&self, name: &str) -> Option<&str> {
        let text = self.annotations.get(&format!("{PREFIX}{name}"))?;
        Some(text.as_str()).filter(|text| !text.is_empty())
    }

    /// The annotation's list, else the setting's.
    fn either(&self, annotation: &str, setting: &[String]) -> Vec<String> {
        match self.stats_annotation(annotation) {
            Some(list) => list.split(',').map(str::to_owned).collect(),
            None => setting.to_vec(),
        }
    }

    fn tags(&self) -> Vec<String> {
        let annotation = self.stats_annotation("extraStatTags").unwrap_or_default();
        let setting = self.proxy_config.extra_stat_tags.iter();
        let all = setting.map(String::as_str).chain(annotation.split(','));
        let mut tags: Vec<String> = Vec::new();
        for tag in all.filter(|tag| !tag.is_empty()) {
            if !tags.iter().any(|known| known == tag) {
                tags.push(tag.to_owned());
            }
        }
        tags
    }

    fn buckets(&mut self) -> BTreeMap<String, Vec<Number>> {
        const NAME: &str = "statsHistogramBuckets";
        let text = self.stats_annotation(NAME).unwrap_or("{}").to_owned();
        serde_json::from_str(&text).unwrap_or_else(|_| {
            let expected = "a JSON object of lists of numbers, leaving it out";
            self.warn(&format!("{PREFIX}{NAME}"), text, expected);
            BTreeMap::new()
        })
    }

    /// An interval that is valid and not zero, which stands for Envoy's default.
    fn interval(
        &mut self,
        annotation: &str,
        expected: &str,
        is_valid: impl Fn(&Duration) -> bool,
    ) -> Option<Duration> {
        let text = self.stats_annotation(annotation)?;
        let Some(interval) = duration::parse(text).filter(is_valid) else {
            let text = text.to_owned();
            self.warn(&format!("{PREFIX}{annotation}"), text, expected);
            return None;
        };
        (!interval.is_zero()).then_some(interval)
    }
}
