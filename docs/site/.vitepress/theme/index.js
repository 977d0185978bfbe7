import theme from 'vitepress/theme'
import Diagram from './Diagram.vue'
import Versions from './Versions.vue'
import './style.css'

export default {
  extends: theme,
  enhanceApp({ app }) {
    app.component('Diagram', Diagram)
    app.component('Versions', Versions)
  },
}
