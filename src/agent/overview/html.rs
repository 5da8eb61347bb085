//! HTML, written so that nothing but this program's own words can be markup.
//!
//! Markup is `&'static str`; everything else goes through [`Html::text`], which escapes it.
//!
//! Does not know what a page is about.

/// A page as it grows.
#[derive(Debug, Default)]
pub(super) struct Html(String);

/// How good a state is; said by a colour, and always beside words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Good,
    Warn,
    Bad,
    Plain,
}

impl Html {
    pub(super) fn markup(&mut self, markup: &'static str) -> &mut Self {
        self.0 += markup;
        self
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        for character in text.chars() {
            match character {
                '&' => self.0 += "&amp;",
                '<' => self.0 += "&lt;",
                '>' => self.0 += "&gt;",
                '"' => self.0 += "&quot;",
                '\'' => self.0 += "&#39;",
                // Others that are no letters could turn around or hide what stands beside them.
                '\n' | '\t' => self.0.push(' '),
                hidden if is_hidden(hidden) => self.0.push('\u{fffd}'),
                plain => self.0.push(plain),
            }
        }
        self
    }

    /// A state in colour and in words.
    pub(super) fn badge(&mut self, tone: Tone, words: &str) -> &mut Self {
        self.markup(match tone {
            Tone::Good => "<b class=good>",
            Tone::Warn => "<b class=warn>",
            Tone::Bad => "<b class=bad>",
            Tone::Plain => "<b>",
        });
        self.text(words).markup("</b>")
    }

    /// What is said in smaller letters, after a space.
    pub(super) fn note(&mut self, text: &str) -> &mut Self {
        self.markup(" <small>").text(text).markup("</small>")
    }

    /// A part of the page, whose source as JSON is beside it.
    pub(super) fn section(
        &mut self,
        title: &'static str,
        json: &'static str,
        content: impl FnOnce(&mut Self),
    ) {
        self.markup("<section>").part(title, json, content);
    }

    /// One that takes all of the width.
    pub(super) fn wide_section(
        &mut self,
        title: &'static str,
        json: &'static str,
        content: impl FnOnce(&mut Self),
    ) {
        self.markup("<section class=wide>")
            .part(title, json, content);
    }

    fn part(&mut self, title: &'static str, json: &'static str, content: impl FnOnce(&mut Self)) {
        self.markup("<h2>").markup(title);
        self.markup(" <a href=\"").markup(json);
        self.markup("\">JSON</a></h2>\n");
        content(self);
        self.markup("</section>\n");
    }

    /// What a thing has, line by line.
    pub(super) fn facts(&mut self, rows: impl FnOnce(&mut Self)) {
        self.markup("<table class=facts>\n");
        rows(self);
        self.markup("</table>\n");
    }

    pub(super) fn fact(&mut self, name: &'static str, value: impl FnOnce(&mut Self)) {
        self.markup("<tr><th scope=row>")
            .markup(name)
            .markup("<td>");
        value(self);
        self.markup("\n");
    }

    /// Things of a kind, one in each row; on a narrow screen, one below the other, where a cell that
    /// needs its column's name has it as `data-of`.
    pub(super) fn list(&mut self, head: &[&'static str], rows: impl FnOnce(&mut Self)) {
        self.markup("<table class=list>\n<tr>");
        for title in head {
            self.markup("<th scope=col>").markup(title);
        }
        self.markup("\n");
        rows(self);
        self.markup("</table>\n");
    }

    pub(super) fn into_text(self) -> String {
        self.0
    }
}

/// Control characters, and those that change the direction of text.
fn is_hidden(character: char) -> bool {
    let turns = matches!(character, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    turns || character.is_control()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_never_markup() {
        let mut html = Html::default();
        html.text("<b a=\"1\" c='2'>&amp;\u{202e}\0 ü\n");
        let expected = "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;\u{fffd}\u{fffd} ü ";
        assert_eq!(html.into_text(), expected);
    }

    #[test]
    fn a_badge_has_words() {
        let mut html = Html::default();
        html.badge(Tone::Bad, "<expired>");
        assert_eq!(html.into_text(), "<b class=bad>&lt;expired&gt;</b>");
    }
}
