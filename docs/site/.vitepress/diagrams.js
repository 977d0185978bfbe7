// Browsers draw the diagrams. Here they are read once, so that a mistake in one is found when the site is built.

export class Diagrams {
  found = new Map() // where each diagram is, by its text

  // plugin is for markdown-it: it has blocks of mermaid drawn.
  plugin = (md, { where }) => {
    const fence = md.renderer.rules.fence
    md.renderer.rules.fence = (tokens, i, options, env, self) => {
      const { info, content, map } = tokens[i]
      if (info.trim() !== 'mermaid') return fence(tokens, i, options, env, self)
      this.found.set(content, where(env, map))
      return `<Diagram source="${md.utils.escapeHtml(content)}" />\n`
    }
  }

  // problems are those of diagrams that mermaid cannot read.
  async problems() {
    const [{ default: sanitizer }, { default: mermaid }] = await Promise.all([import('dompurify'), import('mermaid')])
    // Mermaid cleans texts with it while it reads, which needs a browser. Nothing is drawn here.
    sanitizer.addHook = () => {}
    sanitizer.sanitize = text => text
    // Boxes of sequence diagrams ask whether their first word is a color.
    globalThis.window ??= { CSS: { supports: () => false } }
    const problems = []
    for (const [source, where] of this.found) {
      await mermaid.parse(source).catch(error => problems.push(`${where}: ${error.message}`))
    }
    return problems
  }
}
