import theme from 'vitepress/theme'
import Diagram from './Diagram.vue'
import './style.css'

export default {
  extends: theme,
  enhanceApp({ app }) {
    app.component('Diagram', Diagram)
  },
}
