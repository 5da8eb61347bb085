//! Ports, users and groups, as settings and rules have them.

use std::fmt;
use std::ops::RangeInclusive;

/// Consecutive ports, or a single one.
pub type Ports = RangeInclusive<u16>;

/// Users or groups: consecutive numbers, or a name that the rule's loader resolves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Id {
    Numbers(RangeInclusive<u32>),
    Name(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    User(Id),
    Group(Id),
}

impl From<u32> for Id {
    fn from(number: u32) -> Self {
        Self::Numbers(number..=number)
    }
}

impl Id {
    /// Whether a single user or group is among these.
    pub(super) fn includes(&self, one: &Self) -> bool {
        match (self, one) {
            (Self::Numbers(numbers), Self::Numbers(one)) => numbers.contains(one.start()),
            _ => self == one,
        }
    }
}

/// A single number, or the first and the last of a range.
pub(super) fn range<T: fmt::Display + PartialEq>(
    numbers: &RangeInclusive<T>,
    separator: char,
) -> String {
    let (first, last) = (numbers.start(), numbers.end());
    match first == last {
        true => first.to_string(),
        false => format!("{first}{separator}{last}"),
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Numbers(numbers) => f.write_str(&range(numbers, '-')),
            Self::Name(name) => f.write_str(name),
        }
    }
}
